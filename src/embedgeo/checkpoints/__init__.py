"""Checkpoints of training runs: where they are, which are the same, and how to load them."""

from embedgeo.extras import require_extra

require_extra("sweep", "embedgeo.checkpoints")

from embedgeo.checkpoints.files import Contents as Contents
from embedgeo.checkpoints.files import StoredFile as StoredFile
from embedgeo.checkpoints.files import duplicates as duplicates
from embedgeo.checkpoints.files import shared_parts as shared_parts
from embedgeo.checkpoints.sources import UNREADABLE as UNREADABLE
from embedgeo.checkpoints.sources import Checkpoint as Checkpoint
from embedgeo.checkpoints.sources import Steps as Steps
from embedgeo.checkpoints.sources import is_local as is_local
from embedgeo.checkpoints.sources import list_checkpoints as list_checkpoints
from embedgeo.checkpoints.sources import parse_position as parse_position
from embedgeo.checkpoints.sources import require_source as require_source
from embedgeo.checkpoints.sources import select_steps as select_steps
