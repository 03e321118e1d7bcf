"""Training by replaying CUDA graphs: `captured.py` records them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from paceline.core.parts import Step
from paceline.data.loaders import Inputs
from paceline.training.capture.graph import Graph
from paceline.training.capture.kept import State
from paceline.training.step import Requests, TrainStep

Kind = tuple[int, int, int]
"""Steps that can share a graph: by global batch, parts and samples."""


def kind_of(step: Step) -> Kind:
    """What decides whether steps can share a graph."""
    return step.phase.global_batch, step.phase.parts, step.samples


class CapturedStep:
    """Trains by replaying graphs: one for each kind of step that was captured."""

    def __init__(
        self,
        plain: TrainStep,
        graphs: Mapping[Kind, tuple["Case", Graph]],
        compiled: bool,
        say: Callable[[str], None] = lambda text: None,
        new_state: State | None = None,
    ) -> None:
        """`new_state`: the optimizer's state that the graphs refer to, if the first step has to initialize it."""
        self._plain, self._graphs, self.compiled = plain, graphs, compiled
        self._say, self._new_state, self._said = say, new_state, False

    def __call__(self, step: Step, inputs: Iterator[Inputs], requests: Requests = (False, False)) -> Tensor:
        plain = self._plain
        if self._new_state is not None:
            return self._first(step, inputs, requests)
        case, graph = self._graphs.get(kind_of(step), (None, None))
        if case is None or graph is None or plain.clock.follows_buckets:  # a graph has no buckets to follow
            return plain(step, inputs, requests)
        plain.begin(step.number, requests)
        plain.enter("data")
        given = [next(inputs) for _ in case.step.passes]
        if self._is_outdated() or not graph.fits(given):
            return plain.run(step, iter(given))
        plain.enter(plain.clock.before_replay)
        done = graph(given)
        plain.mark("reduce")  # from here on the host may wait for another worker
        plain.clock.replayed(graph.stamps)
        return done

    def _first(self, step: Step, inputs: Iterator[Inputs], requests: Requests) -> Tensor:
        """The first step, plain: the optimizer initializes its state. The graphs then continue with it, in their own memory."""
        out, held = self._plain(step, inputs, requests), self._new_state or {}
        for parameter, state in self._plain.update.optimizer.state.items():
            for name, tensor in held.get(parameter, {}).items():
                if name in state:
                    state[name] = tensor.copy_(state[name])
        self._new_state = None
        return out

    def _is_outdated(self) -> bool:
        """Whether a scheduler has changed a setting that the graphs contain as a number."""
        if not self._plain.update.rates.changes_settings:
            return False
        if not self._said:
            self._say("the schedule changed a setting of the optimizer: from here on steps run without a CUDA graph")
            self._said = True
        return True


@dataclass(frozen=True)
class Case:
    """One step of an epoch, with inputs to try it on."""

    step: Step
    inputs: list[Inputs]
    seed: Callable[[], None]
    """Seed as the loop would before the first pass."""
