"""A small character language model, trained on text that ships with Python: the help topics of pydoc.

    paceline train examples/char_lm.py --workers 2

A sample is a window of 64 characters; the model predicts each next character. The data is a user-defined map-style Dataset, so
batches come through torch's DataLoader.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline import Task

WINDOW = 64
SYMBOLS = 128  # ASCII; anything else becomes a question mark


def task() -> Task:
    """The function that `paceline train` calls."""
    return Task(
        name="char-lm",
        model=lambda: CharModel(width=96, layers=2),
        train=lambda: Windows(text(), 0.0, 0.9),
        validation=lambda: Windows(text(), 0.9, 1.0),
        objective=next_character,
        unit="windows",
        defaults={
            "optimizer": "adamw",
            "reference_batch": 64,
            "base_lr": 0.003,
            "lr_rule": "sqrt",
            "weight_decay": 0.01,
            "schedule": "cosine",
            "warmup_steps": 20,
            "clip_norm": 1.0,
            "epochs": 1,
        },
    )


def text() -> Tensor:
    """All help topics, as numbers below 128."""
    from pydoc_data.topics import topics

    joined = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(joined.encode("ascii", "replace")), dtype=torch.uint8)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Non-overlapping windows of a range of the text, each with the characters that follow."""

    def __init__(self, characters: Tensor, start: float, stop: float) -> None:
        self._text = characters[int(start * len(characters)) : int(stop * len(characters))]
        self.about = f"pydoc's help topics, {len(self._text):,} characters"

    def __len__(self) -> int:
        return (len(self._text) - 1) // WINDOW

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self._text[index * WINDOW : (index + 1) * WINDOW + 1].long()
        return window[:-1], window[1:]


class CharModel(nn.Module):
    """A small transformer."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(SYMBOLS, width)
        self.places = nn.Embedding(WINDOW, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, SYMBOLS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(WINDOW), persistent=False)

    def forward(self, characters: Tensor) -> Any:
        places = torch.arange(characters.shape[1], device=characters.device)
        hidden = self.characters(characters) + self.places(places)
        return self.out(self.layers(hidden, mask=self.mask, is_causal=True))


def next_character(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Mean loss, bits per character and accuracy of each window."""
    characters, following = batch
    logits = model(characters).float()
    loss = F.cross_entropy(logits.transpose(1, 2), following, reduction="none").mean(1)
    return {
        "loss": loss,
        "bits_per_character": loss / math.log(2),
        "accuracy": (logits.argmax(2) == following).float().mean(1),
    }
