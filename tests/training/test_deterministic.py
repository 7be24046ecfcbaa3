"""Nothing is used that torch documents to raise under ``use_deterministic_algorithms(True)``."""

from contextlib import nullcontext

from torch.utils._python_dispatch import TorchDispatchMode

from embedgeo import observe
from embedgeo.capture import probe
from tests.models import gpt_neox, token_batch

RAISING = ("put_", "histc", "kthvalue", "median.dim", "nanmedian.dim", "logcumsumexp")


class Deterministic(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        kwargs = kwargs or {}
        of_floats = name.startswith("cumsum") and (
            args[0].is_floating_point() or getattr(kwargs.get("dtype"), "is_floating_point", False)
        )
        weighted = name.startswith("bincount") and len(args) > 1 and args[1] is not None
        product = name.startswith("scatter_reduce") and "prod" in args
        raises = name.startswith(RAISING) or of_floats or weighted or product
        assert not raises, func
        return func(*args, **kwargs)


def test_all_default_metrics_have_deterministic_operations_alone(monkeypatch):
    monkeypatch.setattr(probe, "without_modes", nullcontext)  # so that the mode sees them
    model = gpt_neox().requires_grad_(False)
    with Deterministic(), observe(model, jackknife=2, skip_massive=True) as geometry:
        for seed in range(2):
            model(**token_batch(8, seed=seed, padding="left"))
        assert geometry.records()
