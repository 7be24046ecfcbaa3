"""Learning that an optimizer has taken a step, in a loop that does not tell."""

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod, finalize

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


class OptimizerSteps:
    """Calls a function after each step of an optimizer with parameters of a model, while it watches.

    Only torch's optimizers, and their subclasses, are seen. A hook on all of them is there meanwhile, which does not
    keep this object alive.

    Args:
        model: the model.
        on_step: called after a step.
    """

    def __init__(self, model: nn.Module, on_step: Callable[[], None]) -> None:
        self._model = model
        self._on_step = on_step
        self._end: finalize[..., Any] | None = None

    def watch(self) -> None:
        """Begin to watch; does nothing while it does."""
        if self._end is None:
            after = WeakMethod(self._after)

            def hook(*call: Any) -> None:
                if (found := after()) is not None:
                    found(*call)

            self._end = finalize(self, register_optimizer_step_post_hook(hook).remove)

    def ignore(self) -> None:
        """Undo `watch`; not to be called by ``on_step``, because torch goes through the hooks then."""
        end, self._end = self._end, None
        if end is not None:
            end()

    def _after(self, optimizer: Optimizer, *call: object) -> None:
        mine = set(self._model.parameters())
        if any(parameter in mine for group in optimizer.param_groups for parameter in group["params"]):
            self._on_step()
