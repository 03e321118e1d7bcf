"""What the documents say is what the repository holds."""

import importlib.util
import json
import re
from pathlib import Path

import paceline.cli

ROOT = Path(__file__).parents[2]


def test_the_readmes_table_is_the_committed_result() -> None:
    spec = importlib.util.spec_from_file_location("bench_workers", ROOT / "bench" / "workers.py")
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    result = json.loads((ROOT / "bench" / "results" / "workers.json").read_text())
    assert bench.table(result) in (ROOT / "README.md").read_text()


def test_links_between_documents_lead_somewhere() -> None:
    for document in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
        for link in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            assert link.startswith("https://") or (document.parent / link).exists(), f"{document.name}: {link}"


def test_every_flag_the_readme_names_exists() -> None:
    known = {option for verb in ("train", "data") for option in _options(verb)}
    scripts = (ROOT / "fashion_mnist.py").read_text() + (ROOT / "bench" / "workers.py").read_text()
    foreign = {"--nproc-per-node", "--ntasks-per-node"}
    for flag in set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", (ROOT / "README.md").read_text())) - foreign:
        assert flag in known or f'"{flag}"' in scripts, flag


def _options(verb: str) -> set[str]:
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        paceline.cli.run([verb, "--help"])
    return set(re.findall(r"--[a-z][a-z0-9-]+", out.getvalue()))
