"""What to tell a user about an error: one line, the line of their own code where it happened, and the whole traceback.

The frame shown is the deepest one outside Paceline, the standard library and installed packages. Tracebacks that torch passes
on as text, from loader processes and from the compiler, are searched too. Does not import torch.
"""

import difflib
import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from paceline.cells import name_cell
from paceline.errors import Diverged, PacelineError, Stopped, printable, text_of

_HEADLINE = 200  # characters, about two lines of a terminal
_MOST_CODE = 160  # characters of a line of code
_MOST_TRACEBACK = 100_000  # characters
_FOREIGN = "(no line of your own code was found in this traceback; installed packages do not count as your own code)"
_ATTRIBUTE = "_paceline_record"


@dataclass(frozen=True)
class Explanation:
    """Why something failed, for the user."""

    why: str
    """One line."""
    where: str = ""
    """The user's own frame: file, line and function, then the code on a second line. "" if none is known."""
    traceback: str = ""
    unexplained: bool = False
    """`why` is not a message of ours and `where` is empty, so the traceback is all there is."""
    record: str = ""
    """The record whose result.json has the traceback, if there is one."""

    def describe(self, *, whole: bool = False, hint: bool = True) -> str:
        """The text to print: at most 4 lines unless the traceback is all there is, or the `whole` traceback is wanted.

        The `hint` says how to get the traceback.
        """
        lines = [self.why, *(f"  {line}" for line in self.where.splitlines())]
        if self.traceback and (whole or self.unexplained):
            lines += [self.traceback, *[_FOREIGN] * self.unexplained]
        elif self.where and self.traceback and hint:
            file = f", or see {os.path.join(_shorten(self.record), 'result.json')}" if self.record else ""
            lines.append(f"(for the whole traceback, add --traceback{file})")
        return "\n".join(lines)


def explain(error: BaseException) -> Explanation:
    """What to say about this error. An error that a worker reported comes with its own explanation."""
    found = getattr(error, "explanation", None)
    if isinstance(found, Explanation):
        return found
    ours = isinstance(error, PacelineError)
    why = str(error) if ours else headline(error)
    if isinstance(error, Stopped | Diverged | KeyboardInterrupt):  # a signal can arrive in any line of the user's code
        return Explanation(why)
    text = printable("".join(traceback.format_exception(error)).rstrip())
    where = find_user_frame(error)
    unexplained = not (ours or where or _is_out_of_memory(error) or is_device_assert(error))
    return Explanation(why, where, cut_middle(text), unexplained, getattr(error, _ATTRIBUTE, ""))


def note_record(error: BaseException, record: str) -> None:
    """Remember which record has the traceback of this error."""
    with suppress(AttributeError):  # the user's error class has __slots__
        setattr(error, _ATTRIBUTE, record)


def headline(error: BaseException) -> str:
    """The error in one line, with what to do about it if that is known."""
    name, text = type(error).__name__, text_of(error)
    if isinstance(error, SyntaxError):
        text = error.msg or text  # without the file's name, which is part of the frame
    elif _LOADER in text:
        name, text = _original(name, text)
    elif _COMPILER in text:
        text = text.partition(_COMPILER)[0]
    line, advice = " ".join((f"{name}: {text}" if text.strip() else name).split()), ""
    if _is_out_of_memory(error):
        line, advice = line.partition(" GPU ")[0].rstrip("."), _LESS_MEMORY  # torch adds ten lines about the GPU
    elif is_device_assert(error):
        line, advice = f"{line.partition(_DEVICE_ASSERT)[0]}{_DEVICE_ASSERT}", _OUT_OF_RANGE
    elif isinstance(error, ModuleNotFoundError):
        advice = _suggest(error)
    return printable((line if len(line) <= _HEADLINE else f"{line[: _HEADLINE - 3]}...") + advice)


def find_user_frame(error: BaseException) -> str:
    """The user's own frame that led to this error; "" if not found."""
    for link in _chain(error):
        reported = getattr(link, "explanation", None)
        if isinstance(reported, Explanation):
            return reported.where
        if isinstance(link, SyntaxError) and link.filename and _is_users(link.filename):
            return _show(_Frame(link.filename, link.lineno or 0, "", link.text or ""))
        text = text_of(link)
        where = _deepest(_read_frames(text)) if _LOADER in text or _COMPILER in text else ""
        where = where or deepest_user_frame(traceback.extract_tb(link.__traceback__))
        if where:
            return where
    return ""


def deepest_user_frame(frames: Iterable[traceback.FrameSummary]) -> str:
    """The deepest of these frames that is the user's own; "" if none is."""
    return _deepest([_Frame(frame.filename, frame.lineno or 0, frame.name, frame.line or "") for frame in frames])


def cut_middle(text: str) -> str:
    """A traceback, without its middle if it is very long: the two ends are more useful."""
    half = _MOST_TRACEBACK // 2
    return text if len(text) <= 2 * half else f"{text[: half - 10]}\n[...]\n{text[10 - half :]}"


def is_from_loader(error: BaseException) -> bool:
    """Whether a loader process raised this error, and torch passed it on."""
    return _LOADER in text_of(error)


class _Frame(NamedTuple):
    file: str
    line: int
    function: str
    code: str


_LOADER = "Original Traceback (most recent call last):"  # torch.utils.data puts the traceback of a loader process into the text
_COMPILER = "from user code:"  # as torch._dynamo does with the frames of the function that it compiles
_READ_FRAME = re.compile(r'^ *File "(.+?)", line (\d+)(?:, in (.+))?(?:\n +(?!File ")(\S.*))?', re.MULTILINE)


def _read_frames(text: str) -> list[_Frame]:
    return [_Frame(file, int(line), name, code) for file, line, name, code in _READ_FRAME.findall(text)]


def _original(name: str, text: str) -> tuple[str, str]:
    """The name and text of the error that a loader process raised: what follows the last frame, not indented."""
    text = text.partition(_LOADER)[2]
    end = max((frame.end() for frame in _READ_FRAME.finditer(text)), default=0)
    lines = text[end:].splitlines()
    start = next((i for i, line in enumerate(lines) if line and not line.startswith(" ")), None)
    if start is None:
        return name, ""
    kind, _, said = "\n".join(lines[start:]).partition(": ")
    return kind.strip().rpartition(".")[2] or name, said


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes. An error that was being handled when one of ours was raised need not be its cause."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        before = None if link.__suppress_context__ or isinstance(link, PacelineError) else link.__context__
        link = link.__cause__ or before


def _deepest(frames: list[_Frame]) -> str:
    return next((_show(frame) for frame in reversed(frames) if _is_users(frame.file)), "")


def _is_users(file: str) -> bool:
    """Whether this is a file of the user's, or a cell of a notebook."""
    if file.startswith("<"):  # made by a program: <string>, <frozen importlib._bootstrap>, <eval_with_key>.0
        return file.startswith(("<ipython-input", "<stdin>", "<python-input"))
    paths = {os.path.abspath(file), os.path.realpath(file)}
    parts = {part for path in paths for part in path.split(os.sep)}
    if parts & {"site-packages", "dist-packages", ".triton"} or any(part.startswith("torchinductor_") for part in parts):
        return False
    return not any(path.startswith(folder + os.sep) for path in paths for folder in _library_folders())


def _library_folders() -> set[str]:
    """Paceline, the standard library and generated code. Packages are recognized by the names of their folders."""
    found = [os.path.dirname(__file__), *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))]
    found += [os.environ[name] for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR") if os.environ.get(name)]
    return {made for path in found for made in (os.path.abspath(path), os.path.realpath(path))}


def _show(frame: _Frame) -> str:
    function = f", in {frame.function}" if frame.function not in ("", "<module>") else ""
    code = (frame.code or linecache.getline(frame.file, frame.line)).strip()
    code = code if len(code) <= _MOST_CODE else f"{code[: _MOST_CODE - 3]}..."
    shown = f"{_shorten(frame.file)}, line {frame.line}{function}" + (f"\n    {code}" if code else "")
    return printable(shown)


def _shorten(file: str) -> str:
    """A path as the user would write it: relative if it is below the current folder. A cell of a notebook has a number."""
    cell = name_cell(file)
    if cell or file.startswith("<"):
        return cell or file
    with suppress(OSError):  # the current folder was removed
        relative = os.path.relpath(file)
        if not relative.startswith(os.pardir):
            return relative
    return file


_LESS_MEMORY = "; try --accumulate 2 or more, --parts-at-once 1, --loader streaming or a smaller --global-batch"
_NO_MEMORY = ("CUDA error: out of memory", "not enough memory: you tried to allocate", "can't allocate memory")


def _is_out_of_memory(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or any(words in text_of(error) for words in _NO_MEMORY)


_DEVICE_ASSERT = "device-side assert triggered"
_OUT_OF_RANGE = (
    ": an index is out of range on the GPU, often a label that the model has no class for; to see the line, run the same"
    " command on the CPU, with CUDA_VISIBLE_DEVICES= in front"
)


def is_device_assert(error: BaseException) -> bool:
    """Whether a check on the GPU failed. CUDA does not say in which line, and this process can no longer use it."""
    return _DEVICE_ASSERT in text_of(error)


_PACKAGES = {
    **{"PIL": "pillow", "cv2": "opencv-python", "skimage": "scikit-image", "sklearn": "scikit-learn", "yaml": "pyyaml"},
    **{name: name for name in ("accelerate", "albumentations", "datasets", "einops", "h5py", "matplotlib", "pandas", "peft")},
    **{name: name for name in ("scipy", "tensorboard", "timm", "tokenizers", "torchaudio", "torchmetrics", "torchvision")},
    **{name: name for name in ("tqdm", "transformers", "wandb", "webdataset")},
}
"""Modules that tasks often import, and the names of their packages."""


def _suggest(error: ModuleNotFoundError) -> str:
    """What to do about a missing module, if that is certain enough to say: `pip install` only for a package that we know."""
    name = error.name or ""
    if name in _PACKAGES:
        return f" (pip install {_PACKAGES[name]})"
    from importlib import metadata  # here: `paceline --help` should not wait for it

    known = {*_PACKAGES, *sys.stdlib_module_names, *metadata.packages_distributions()}
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8) if len(name) <= 100 else []
    return f" (did you mean {near[0]}?)" if near else ""
