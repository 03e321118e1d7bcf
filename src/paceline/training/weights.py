"""A model's weights: write them into a record, under the model's own names, and hash them."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from paceline.errors import PacelineError, RecordError
from paceline.files import replacing


def write_weights(target: Path, model: nn.Module, about: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file that is either complete or absent. `about` goes into its header.

    Raises a RecordError if that fails.
    """
    from safetensors.torch import save_file, save_model

    facts = None if about is None else dict(about)
    try:
        with replacing(target) as path:
            try:
                save_model(model, str(path), metadata=facts)
            except RuntimeError:  # views that share memory which none of them covers: save a copy of each
                tensors = {name: t.clone().contiguous() for name, t in model.state_dict().items()}
                save_file(tensors, str(path), metadata=facts)
    except PacelineError:
        raise
    except Exception as error:  # a full disk is a SafetensorError, not an OSError; unsupported kinds of tensors; ...
        why = " ".join(str(error).split()) or type(error).__name__
        raise RecordError(f"cannot write {target}: {why}; free some space or choose another --runs-dir") from error


def model_sha256(model: nn.Module) -> str:
    """A hash of the model's weights and buffers, bit for bit, names included."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
