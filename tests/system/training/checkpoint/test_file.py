"""Checkpoints in a child process that is killed, refused memory, or out of disk."""

import sys
from pathlib import Path

from harness.processes import run
from unit.training.checkpoint import test_file as unit_tests
from unit.training.checkpoint.test_file import file_of

folder = unit_tests.folder


def test_out_of_memory_in_torch_is_an_error_not_damage(tmp_path):
    """A real allocation that fails: the address space has no room for a tensor of 400 MB."""
    lines = child(
        """
here = Path("here")
writer = Writer(here, 2, print)
writer.save(60, {}, {})
writer.save(120, {"x": torch.zeros(100_000_000)}, {})
writer.close()
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
limit = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + 200_000_000, limit[1]))
try:
    load_latest(here, print)
except CheckpointError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, limit)
print(load_latest(here, print).step)
""",
        tmp_path,
    )
    assert lines == ["cannot read checkpoint step-000000120 in here: out of memory; free some and resume", "120"]


def child(body: str, folder: Path) -> list[str]:
    """Run code in a separate process, in the folder; returns the lines it printed."""
    begin = "import os, random, resource, shutil, signal, sys, threading, torch\nfrom pathlib import Path\n"
    begin += "from paceline.training.checkpoint import file as checkpoint\nfrom paceline.training.checkpoint.file import *\n"
    begin += "torch.set_num_threads(1)\n"
    done = run([sys.executable, "-c", f"{begin}os.chdir({str(folder)!r})\n{body}"])
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_disk_that_refuses_large_files_for_some_time(tmp_path):
    """A real failing write: beyond RLIMIT_FSIZE it ends with EFBIG (Python ignores SIGXFSZ)."""
    lines = child(
        """
here = Path("here")
writer = Writer(here, 1, print)
tensors = {"x": torch.rand(100_000)}
writer.save(60, tensors, {})
print(writer.wait())
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limit[1]))
for step in (120, 180):
    writer.save(step, tensors, {})
    print(writer.wait(), *os.listdir(here))
resource.setrlimit(resource.RLIMIT_FSIZE, limit)
writer.save(240, tensors, {"fine": True})
print(writer.wait(), *os.listdir(here))
writer.close()
found = load_latest(here, print)
print(found.step, found.facts, torch.equal(found.tensors["x"], tensors["x"]))
""",
        tmp_path,
    )
    text = "could not write the checkpoint at step {}: File too large; training continues, the last good checkpoint is step 60"
    assert lines == [
        "True",
        text.format(120),
        f"False {file_of(60)}",
        text.format(180),
        f"False {file_of(60)}",
        f"True {file_of(240)}",
        "240 {'fine': True} True",
    ]


def test_a_folder_without_permission_is_one_line(tmp_path):
    lines = child(
        """
tensors = {"x": torch.rand(10)}
here, later = Path("here"), Path("later")
Path().chmod(0o755)
here.mkdir(mode=0o555)
writer = Writer(later, 1, print)
writer.save(1, tensors, {})
print(writer.wait())
(later / "step-000000001.safetensors").chmod(0o000)
later.chmod(0o555)
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)  # nobody: root may write anywhere
try:
    Writer(here, 1, print)
except CheckpointError as error:
    print(error)
try:
    Writer(here / "below", 1, print)
except CheckpointError as error:
    print(error)
writer.save(2, tensors, {})
print(writer.wait())
writer.close()
try:
    load_latest(later, print)
except CheckpointError as error:
    print(error)
""",
        tmp_path,
    )
    assert lines == [
        "True",
        "cannot write checkpoints in here: Permission denied; choose another folder",
        "cannot write checkpoints in here/below: Permission denied; choose another folder",
        "could not write the checkpoint at step 2: Permission denied; training continues, the last good checkpoint is step 1",
        "False",
        "cannot read checkpoint step-000000001 in later: Permission denied; make it readable, or remove it to start over",
    ]


KILLED = """
here = Path("here")

def contents(step):
    return step, {"x": torch.full((size,), float(step)), "y": torch.tensor(step)}, {"step": step}

def begin():
    shutil.rmtree(here, ignore_errors=True)
    writer = Writer(here, 1, print)
    writer.save(*contents(0))
    writer.close()

def save_until_killed(done):
    writer = Writer(here, 1, print)
    first = load_latest(here, print).step
    for step in range(first + 1, first + 1000):
        writer.save(*contents(step))
        if writer.wait():
            os.write(done, step.to_bytes(8, "little"))

def killed(trace=None, delay_s=None):
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            threading.settrace(trace)  # for threads started from now on: the writer's
            save_until_killed(theirs)
        finally:
            os._exit(3)
    os.close(theirs)
    known = b""
    if delay_s is not None:
        known = os.read(ours, 8)
        threading.Event().wait(delay_s)  # not for an event: any moment will do
        os.kill(pid, signal.SIGKILL)
    while more := os.read(ours, 8):
        known = more
    os.close(ours)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    found = load_latest(here, print)
    _, tensors, facts = contents(found.step)
    assert found.step >= int.from_bytes(known, "little"), "what wait() promised is gone"
    assert found.facts == facts and all(torch.equal(found.tensors[name], tensors[name]) for name in ("x", "y"))
    return found.step
"""


def test_a_kill_at_any_line_leaves_a_complete_checkpoint(tmp_path):
    """Killed at the writer thread's first line, its second, and so on through a save, its pruning and the next save."""
    lines = child(
        KILLED
        + """
size = 1000

def kill_at(count):
    def trace(frame, event, _):
        nonlocal count
        if frame.f_code.co_filename == checkpoint.__file__:
            count -= 1
            if not count:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    return trace

kills = step = 0
while step < 2:
    begin()
    kills += 1
    step = killed(trace=kill_at(kills))
print("kills", kills)
""",
        tmp_path,
    )
    (line,) = lines  # and there were no notes
    assert int(line.removeprefix("kills ")) > 100


def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path):
    """As above, but inside the write calls: 4 MB each, so most kills come in the middle of one."""
    lines = child(
        KILLED
        + """
size = 1_000_000
begin()
draw = random.Random(5)
last = 0
for _ in range(25):
    step = killed(delay_s=draw.random() / 30)
    assert step > last
    last = step
print("done")
""",
        tmp_path,
    )
    assert lines == ["done"]  # and there were no notes
