"""Hugging Face's `outputs.loss`, a mean over the tokens of a batch, with the number of tokens as its weight."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.processes import run_workers
from harness.training import ALONE, Trained, train_in
from paceline.config import make_config
from paceline.data.loaders import Arrays
from paceline.dist.world import World
from paceline.training.build import build
from paceline.training.task import Task

SAMPLES, LENGTH, VOCABULARY = 29, 9, 17
pytest.importorskip("transformers", reason="install transformers")


def texts() -> tuple[Tensor, Tensor, Tensor]:
    """Token numbers, attention masks, and labels with -100 for padding; lengths differ, and some have one token only."""
    random = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=random)
    mask = (torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (SAMPLES, 1), generator=random)).long()
    return tokens, mask, tokens.masked_fill(mask == 0, -100)


def make_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **size))


def objective(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    tokens, mask, labels = batch
    outputs = model(input_ids=tokens, attention_mask=mask, labels=labels)
    return {"loss": outputs.loss, "weight": (labels[:, 1:] != -100).sum()}


TASK = Task(
    name="texts",
    model=make_model,
    train=lambda: Arrays(texts()),
    validation=lambda: Arrays(texts()),
    objective=objective,
    defaults={
        **{"global_batch": 8, "reference_batch": 8, "base_lr": 0.5, "epochs": 1, "eval_batch": 6, "weight_decay": 0.0},
        **{"momentum": 0.0, "nesterov": False, "virtual_workers": 2},
    },
)


def train(world: World) -> list[Trained]:
    return [train_in(world, TASK, options) for options in ({}, {"reduce": "exact"}, {"reduce": "exact", "accumulate": 2})]


def test_a_step_is_the_gradient_of_one_big_batch() -> None:
    run = build(TASK, make_config(dict(TASK.defaults), {}), ALONE)
    assert run.contract.parts == "in turn: the loss is one number per batch"
    model, losses = run.model, []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    order, bounds = torch.from_numpy(run.sampler.order(0)), run.sampler.cut(0).bounds
    for number in range(run.sampler.cut(0).steps):
        i = order[bounds[number] : bounds[number + 1]]
        optimizer.param_groups[0]["lr"] = run.update.schedule.lr(number)
        optimizer.zero_grad()
        loss = objective(model, [each[i] for each in texts()])["loss"]  # of the whole global batch
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        whole = float(objective(model.eval(), texts())["loss"])
    alone, workers = train(ALONE), run_workers(train, 2)
    for trained in (*alone, *workers[0]):
        assert [row["loss"] for row in trained.watcher.steps] == pytest.approx(losses, rel=1e-4)
        assert trained.result.metrics["loss"] == pytest.approx(whole, rel=1e-4)
        for name, tensor in model.state_dict().items():
            assert trained.weights[name] == pytest.approx(tensor.numpy(), rel=1e-3, abs=1e-5)
    for number in (1, 2):  # exact
        hashes = {one[number].result.model_sha256 for one in (alone, *workers)}
        assert len(hashes) == 1
