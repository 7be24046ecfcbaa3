import os

import torch
from hypothesis import settings

# The same examples every time in the ordinary run; `--hypothesis-profile=fuzz` draws new and many more ones for the
# tests that do not fix their number.
settings.register_profile("default", deadline=None, derandomize=True, max_examples=100)
settings.register_profile("fuzz", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

torch.set_num_threads(1)
