"""Fail on phrases that this repository does not use: archaic or odd English, and British spellings.

    python tools/check_english.py [FILE ...]      # default: every tracked .py, .md, .js, .toml and .html file

Prints file:line, the phrase and what to write instead; exits with 1 if there are any. It catches only the worst phrases: read
your sentences aloud as well.
"""

import re
import subprocess
import sys
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("*.py", "*.md", "*.js", "*.toml", "*.html")
EXCLUDED = ("tools/check_english.py", "tests/unit/test_check_english.py")  # they quote the phrases

PHRASES = {  # regular expression -> what to write instead
    r"so many\b(?! \w+ that)": "a number or a name: N steps, every n-th sample, this many",
    r"anew|afresh": "again",
    r"to be had": "available",
    r"stop to pay": "stop paying off",
    r"up to which more workers pay": "beyond which more workers stop paying off",
    r"(?:one|values?|row|line|loss|samples|processes|threads?) a (?:worker|part|bucket|step|sample|node|rank|minute)": "per",
    r"(?:once|one|row|line|steps) an epoch": "per epoch",
    r"every worker reaches this": "Collective: call on every rank",
    r"which no\b(?! longer)": "which ... cannot",
    r"as always": "as before",
    r"what (?:was|is) told": "the given options",
    r"unless told otherwise": "by default",
    r"who (?:trains|watches|may look|looks|does) (?:what|which|a run)": "which optimizer owns what; observers; access control",
    r"nobody's business": "what is private",
    r"for the eye": "for display",
    r"what to make of": "interpretation",
    r"there is none": "not found",
    r"is no (?:batch|hidden|moment|plain|measurement)": "is not a",
    r"thereof|wherein|whereby|hitherto|herein": "of it; in which; by which; until now; here",
    # British spellings
    r"(?:initial|normal|minim|maxim|optim|general|summar|synchron|serial|organ|recogn|visual|random|real|parallel|vector|token"
    r"|quant|regular|character|special|standard|final|util|categor|emphas)is(?:e[drs]?|ing|ations?)": "-ize, -ization",
    r"(?:behavi|col|neighb|fav)ours?(?:ed|ing|able|ite)?": "-or: behavior, color, neighbor, favor",
    r"(?:labe|cance|mode|trave)ll(?:ed|ing)": "one l: labeled, canceled, modeled, traveled",
    r"analys(?:e[ds]?|ing)": "analyze",
    r"centred?|licences?|catalogues?|artefacts?|grey": "center, license, catalog, artifact, gray",
    r"whilst|amongst|towards": "while, among, toward",
}
ANY = "|".join(rf"(?P<rule{i}>{each})" for i, each in enumerate(PHRASES))
RULE = re.compile(rf"(?<![a-z])(?:{ANY})(?![a-z])", re.IGNORECASE)
INSTEAD = list(PHRASES.values())
BREAK = re.compile(r"[ \t]*\n[ \t#*>]*")  # the end of a line, and the indent or comment sign of the next


def main(argv: list[str]) -> int:
    """Check the files; 1 if any has a phrase to rewrite."""
    found = [finding for path in map(Path, argv or tracked()) for finding in check(path, path.read_text(encoding="utf-8"))]
    for finding in found:
        print(finding)
    if found:
        print(f"{len(found)} phrase(s) to rewrite in plain American English")
    return bool(found)


def tracked() -> list[str]:
    """Tracked files with prose, except those that quote the phrases."""
    listed = subprocess.run(["git", "ls-files", "-z", "--", *KINDS], cwd=ROOT, check=True, capture_output=True, text=True)
    names = [name for name in listed.stdout.split("\0") if name and name not in EXCLUDED]
    return [str(ROOT / name) for name in names if (ROOT / name).is_file()]


def check(path: Path, text: str) -> list[str]:
    """Findings as `file:line: phrase: write this instead`. A phrase may continue on the next line."""
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
    lines = BREAK.split(text)
    starts = list(accumulate((len(line) + 1 for line in lines), initial=0))  # of each line in the joined text
    found = []
    for match in RULE.finditer(" ".join(lines)):
        number = bisect_right(starts, match.start())
        found.append(f"{name}:{number}: {match[0]!r}: write {INSTEAD[int((match.lastgroup or '')[4:])]!r}")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
