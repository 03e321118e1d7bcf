"""The user's own frame of an error, the error in one line, and what is printed about it."""

import linecache
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch._utils import ExceptionWrapper

import paceline
from paceline.errors import Diverged, PacelineError, Stopped, UsageError, refuse_exit
from paceline.explanation import Explanation, explain, find_user_frame, headline, note_record

LIBRARY = Path(sysconfig.get_path("purelib")) / "somelib" / "code.py"
OURS = Path(paceline.__file__).parent / "training" / "loop.py"
CALLS = "def call(function):\n    return function()\n"


class Code:
    """Source as if it came from a file anywhere: compiled under that name, and known to the module that shows lines."""

    def __init__(self, file: str | Path, text: str, **names: Any) -> None:
        self.names = dict(names)
        linecache.cache[str(file)] = (len(text), None, text.splitlines(keepends=True), str(file))
        exec(compile(text, str(file), "exec"), self.names)

    def __getattr__(self, name: str) -> Any:
        return self.names[name]


def caught(function: Callable[..., Any], *args: Any) -> BaseException:
    with pytest.raises(BaseException) as found:  # noqa: PT011
        function(*args)
    found.value.__traceback__ = found.value.__traceback__ and found.value.__traceback__.tb_next  # not pytest's or this file's
    return found.value


def in_task(text: str, **names: Any) -> Code:
    """A task file in the current folder."""
    return Code(Path.cwd() / "my_task.py", text, **names)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_deepest_frame_of_the_user_is_found_among_those_of_libraries():
    """objective -> torch -> forward of the user's model -> torch: the line in forward is the one to look at."""
    call = Code(LIBRARY, CALLS + "def fail():\n    raise ValueError('bad shape')\n")
    task = in_task(
        "def forward():\n    return fail()\ndef objective():\n    return call(forward)\n", call=call.call, fail=call.fail
    )
    loop = Code(OURS, CALLS)
    error = caught(loop.call, task.objective)
    assert find_user_frame(error) == "my_task.py, line 2, in forward\n    return fail()"


@pytest.mark.parametrize(
    "file",
    [
        OURS,
        LIBRARY,
        Path(sysconfig.get_path("stdlib")) / "json" / "decoder.py",
        "/usr/lib/python3/dist-packages/numpy/core.py",
        "/tmp/torchinductor_me/ab/cabc.py",
        "<string>",
        "<frozen importlib._bootstrap>",
        "<eval_with_key>.12",
    ],
)
def test_other_frames_are_not_the_users(file: str | Path):
    fail = Code(file, "def fail():\n    raise ValueError('bad')\n").fail
    found = explain(caught(fail))
    assert (found.where, found.unexplained) == ("", True)


def test_the_compilers_own_cache_is_not_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    assert find_user_frame(caught(Code(tmp_path / "cache" / "x.py", "def fail():\n    raise ValueError\n").fail)) == ""


def test_a_notebooks_cell_and_a_file_elsewhere_are_the_users(tmp_path: Path):
    cell = Code("<ipython-input-3-abc>", "def objective():\n    return 1 / 0\n")
    assert find_user_frame(caught(cell.objective)) == "<ipython-input-3-abc>, line 2, in objective\n    return 1 / 0"
    elsewhere = tmp_path.parent / "lib.py"
    assert find_user_frame(caught(Code(elsewhere, "def f():\n    return 1 / 0\n").f)).startswith(f"{elsewhere}, line 2, in f\n")


def test_a_module_of_the_users_that_the_task_imports_is_theirs():
    Path("data").mkdir()
    neighbor = Code(Path.cwd() / "data" / "images.py", "x = 1\ndef read():\n    raise OSError('no disk')\n")
    task = in_task("def data():\n    return read()\n", read=neighbor.read)
    assert find_user_frame(caught(task.data)) == "data/images.py, line 3, in read\n    raise OSError('no disk')"


def test_a_cause_is_followed_if_the_error_itself_is_not_in_user_code():
    task = in_task("def objective():\n    return 1 / 0\n")
    wraps = "def call(f):\n    try:\n        f()\n    except Exception as error:\n        raise OSError('x') from error\n"
    assert find_user_frame(caught(Code(LIBRARY, wraps).call, task.objective)).startswith("my_task.py, line 2")
    drops = wraps.replace("from error", "from None")
    assert find_user_frame(caught(Code(LIBRARY, drops).call, task.objective)) == ""
    without = wraps.replace(" from error", "")
    assert find_user_frame(caught(Code(LIBRARY, without).call, task.objective)).startswith("my_task.py, line 2")


def test_what_happened_before_an_error_of_ours_did_not_cause_it():
    task = in_task("def objective():\n    return 1 / 0\n")
    text = (
        "def call(function):\n    try:\n        function()\n    except Exception:\n        raise PacelineError('disk full')\n"
    )
    found = explain(caught(Code(OURS, text, PacelineError=PacelineError).call, task.objective))
    assert found.describe() == "disk full"


def test_an_error_of_ours_shows_the_users_call():
    refuse = Code(OURS, "def refuse():\n    raise UsageError('name is 3: it must be text')\n", UsageError=UsageError).refuse
    task = in_task("def task():\n    return refuse()\n", refuse=refuse)
    lines = explain(caught(task.task)).describe().splitlines()
    assert lines[:3] == ["name is 3: it must be text", "  my_task.py, line 2, in task", "      return refuse()"]
    assert explain(caught(refuse)).describe() == "name is 3: it must be text"


def test_a_request_to_stop_and_a_divergence_have_no_frame():
    """A signal arrives in whatever line is running."""
    for error in (Stopped("stopped by SIGTERM", "SIGTERM"), Diverged("the loss is nan"), KeyboardInterrupt()):
        task = in_task("def objective():\n    raise error\n", error=error)
        found = explain(caught(task.objective))
        assert (found.where, found.traceback) == ("", "")


def test_an_exit_stays_one_line():
    task = in_task("import sys\ndef objective():\n    sys.exit(0)\n")
    error = caught(refuse_exit()(task.objective))
    assert explain(error).describe().startswith("sys.exit(0) was called in objective, line 3 of my_task.py")
    assert "\n" not in explain(error).describe()


def wrapped(error: BaseException) -> BaseException:
    """The error as torch raises it again after a loader process raised it."""
    try:
        raise error
    except BaseException:
        made = ExceptionWrapper(where="in DataLoader worker process 0")
    return caught(made.reraise)


def test_the_frame_and_the_text_of_a_loader_process_are_read_from_torchs_text():
    item = in_task("class Data:\n    def __getitem__(self, i):\n        raise KeyError(f'no sample {i}')\n").Data()
    error = wrapped(caught(item.__getitem__, 3))
    assert headline(error) == "KeyError: 'no sample 3'"
    assert find_user_frame(error) == "my_task.py, line 3, in __getitem__\n    raise KeyError(f'no sample {i}')"
    assert "in DataLoader worker process 0" in explain(error).traceback


def test_an_error_class_of_the_users_and_several_lines_of_text():
    text = "class Odd(Exception):\n    def __init__(self, a, b):\n        super().__init__(f'{a}\\n{b}')\n"
    task = in_task(text + "def read():\n    raise Odd('first', 'second')\n", __name__="my_task")
    error = wrapped(caught(task.read))  # torch cannot make another Odd from one text: it raises a RuntimeError
    assert type(error) is RuntimeError
    assert headline(error) == "Odd: first second"


def test_the_frame_that_the_compiler_names():
    text = (
        "Dynamo failed to run FX node with fake tensors: got RuntimeError('shapes')\n\nfrom user code:\n"
        f'   File "{Path.cwd()}/my_task.py", line 7, in forward\n    return self.head(x)\n'
        f'  File "{LIBRARY}", line 3, in linear\n    return f(x)\n\nSet TORCH_LOGS="+dynamo" for more information\n'
    )
    task = in_task(
        "def objective():\n    fail()\n", fail=Code(LIBRARY, "def fail():\n    raise error\n", error=RuntimeError(text)).fail
    )
    error = caught(task.objective)
    assert find_user_frame(error) == "my_task.py, line 7, in forward\n    return self.head(x)"
    assert headline(error) == "RuntimeError: Dynamo failed to run FX node with fake tensors: got RuntimeError('shapes')"


@pytest.mark.parametrize(
    ("text", "reason", "where"),
    [
        ("x = 1\ndef task(:\n", "SyntaxError: invalid syntax", "my_task.py, line 2\n    def task(:"),
        ("def task():\nreturn 1\n", "IndentationError: expected an indented block", "my_task.py, line 2\n    return 1"),
    ],
)
def test_a_file_that_is_not_python(text: str, reason: str, where: str):
    error = caught(compile, text, str(Path.cwd() / "my_task.py"), "exec")
    assert headline(error).startswith(reason)
    assert "my_task.py" not in headline(error)
    assert find_user_frame(error) == where


@pytest.mark.parametrize(
    ("module", "advice"),
    [("torchvison", " (did you mean torchvision?)"), ("cv2", " (pip install opencv-python)"), ("my_neighbor_file", "")],
)
def test_a_missing_module_names_the_users_line(module: str, advice: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cv2", None)  # as if it were not installed
    error = caught(in_task, f"import os\nimport {module}\n")
    if module == "cv2":
        error = ModuleNotFoundError("No module named 'cv2'", name="cv2").with_traceback(error.__traceback__)
    assert find_user_frame(error) == f"my_task.py, line 2\n    import {module}"
    assert headline(error) == f"ModuleNotFoundError: No module named '{module}'{advice}"


class OutOfMemoryError(RuntimeError):
    """torch's is recognized by its name, so that torch need not be imported."""


@pytest.mark.parametrize(
    ("error", "start"),
    [
        (
            OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139 GiB of which"),
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB; try --accumulate",
        ),
        (MemoryError(), "MemoryError; try --accumulate"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "RuntimeError: Default"),
    ],
)
def test_out_of_memory_is_one_line_with_what_to_do(error: Exception, start: str):
    fail = Code(OURS, "def fail():\n    raise error\n", error=error).fail
    (line,) = explain(caught(fail)).describe().splitlines()
    assert line.startswith(start)
    assert line.endswith("; try --accumulate 2 or more, --parts-at-once 1, --loader streaming or a smaller --global-batch")


def test_a_failed_check_on_the_gpu_is_one_line_with_what_to_do():
    error = RuntimeError(
        "CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in ...\nCUDA kernel errors might"
    )
    (line,) = explain(caught(Code(OURS, "def fail():\n    raise error\n", error=error).fail)).describe().splitlines()
    assert line.startswith("RuntimeError: CUDA error: device-side assert triggered: an index is out of range on the GPU")
    assert "CUDA_VISIBLE_DEVICES= in front" in line


def test_an_error_without_a_line_of_the_users_shows_everything_and_says_so():
    text = explain(caught(Code(OURS, "def fail():\n    raise LookupError('a bug')\n").fail)).describe()
    lines = text.splitlines()
    assert lines[:2] == ["LookupError: a bug", "Traceback (most recent call last):"]
    assert lines[-2] == "LookupError: a bug"
    assert lines[-1].startswith("(no line of your own code was found in this traceback")


def test_what_is_printed_is_short_and_names_the_record():
    error = caught(in_task("def objective():\n    return 1 / 0\n").objective)
    short = ["ZeroDivisionError: division by zero", "  my_task.py, line 2, in objective", "      return 1 / 0"]
    assert explain(error).describe().splitlines() == [*short, "(for the whole traceback, add --traceback)"]
    note_record(error, str(Path.cwd() / "runs" / "x"))
    assert explain(error).describe().splitlines() == [
        *short,
        "(for the whole traceback, add --traceback, or see runs/x/result.json)",
    ]
    whole = explain(error).describe(whole=True).splitlines()
    assert whole[:4] == [*short, "Traceback (most recent call last):"]
    assert whole[-1] == short[0]


def test_a_headline_is_cut():
    assert headline(ValueError("one\n  two")) == "ValueError: one two"
    assert headline(AssertionError()) == "AssertionError"
    assert len(headline(ValueError(1000 * "x"))) == 200
    assert headline(ValueError(1000 * "x")).endswith("x...")


def test_everything_has_a_limit_and_nothing_controls_the_terminal():
    text = "def objective():\n    raise ValueError('\x1b[2J' + 300_000 * 'x')" + 500 * " " + "# " + 500 * "x" + "\n"
    found = explain(caught(in_task(text).objective))
    assert len(found.why) <= 210
    assert len(found.where) < 300
    assert 90_000 < len(found.traceback) <= 100_000
    assert found.traceback.startswith("Traceback")
    assert found.traceback.endswith("xxx")
    assert "\x1b" not in found.why + found.where + found.traceback


def test_an_error_that_a_worker_reported_keeps_its_explanation():
    class Reported(PacelineError):
        explanation = Explanation("worker 1 failed first: ValueError: x", "my_task.py, line 1", "Traceback")

    assert explain(Reported("text")) is Reported.explanation
    error = UsageError("arm 'a': x")
    error.__cause__ = Reported("text")
    assert explain(error).where == "my_task.py, line 1"


def test_a_removed_folder_is_not_a_second_error(tmp_path: Path):
    error = caught(in_task("def objective():\n    return 1 / 0\n").objective)
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    try:
        assert f"{tmp_path}/my_task.py, line 2" in explain(error).where
    finally:
        os.chdir(tmp_path)
