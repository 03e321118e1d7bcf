"""Completion in bash, as bash itself does it."""

import subprocess

from harness.processes import paceline

TRY = """
try() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _paceline; printf '%s\\n' "${COMPREPLY[*]}"; }
try paceline tr
try paceline train my
try paceline train x --red
try paceline train x --reduce ''
try paceline train x --reduce = e
try paceline train x --reduce=e
try paceline rehearse x --see
try paceline data ''
try paceline help s
try paceline train x --seed ''
complete -p paceline
"""


def test_bash_completes_verbs_flags_choices_and_files(runs, tmp_path):
    (tmp_path / "my_task.py").touch()
    (tmp_path / "my notes.txt").touch()
    script = paceline("completion", "bash").stdout
    command = ["bash", "-c", script + TRY]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "train",
        "my_task.py",
        "--reduce",
        "fast exact",
        "exact",
        "--reduce=exact",
        "--seeds",
        "list fetch verify",
        "scale sharpness study",
        "",
        "complete -o default -F _paceline paceline",
    ]
