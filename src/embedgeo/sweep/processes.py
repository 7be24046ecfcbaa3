"""Libraries that keep quiet in the processes of a sweep."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

# on options that are the user's choice, on how lightning walks batches, and to the writer of a file
_ADVICE = (
    ".*does not have many workers|GPU available but not used|.*treespec, LeafSpec|Detected pickle "
    "protocol"
)


@contextmanager
def muted_libraries() -> Iterator[None]:
    """Context without the progress bars, log messages and advice of the libraries that load and run
    models.
    """
    from huggingface_hub.utils import logging as hub_logging
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars
    from transformers.utils import logging as transformers_logging

    with ExitStack() as after, warnings.catch_warnings():
        warnings.filterwarnings("ignore", _ADVICE)
        after.callback(setattr, warnings, "formatwarning", warnings.formatwarning)
        # not where in the code it is from
        warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
        for library in (hub_logging, transformers_logging):
            after.callback(library.set_verbosity, library.get_verbosity())
            library.set_verbosity(logging.ERROR)
        for name in ("accelerate", "lightning.pytorch", "lightning.fabric"):
            logger = logging.getLogger(name)
            after.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        after.callback(enable_progress_bars)
        disable_progress_bars()
        if transformers_logging.is_progress_bar_enabled():
            after.callback(transformers_logging.enable_progress_bar)
        transformers_logging.disable_progress_bar()
        yield
