"""The architecture of the models of a sweep, in its manifest."""

import json

from embedgeo.results.files import replacing
from embedgeo.results.folder import SweepFolder


def note_architecture(folder: SweepFolder) -> None:
    """Write ``architecture``, ``post-ln`` or ``pre-ln``, of the checkpoints that are done into the manifest.

    Where models differ in it, it is a mapping by model. This process may not hold `embedgeo.results.locks.Locks` of the
    folder meanwhile.
    """
    found: dict[str, str] = {}
    for name in sorted(folder.done()):
        if kind := folder.about(name).get("architecture"):
            found[str(folder.read(name)["model"].iloc[0])] = kind
    now = found if len(set(found.values())) > 1 else next(iter(found.values()), None)
    manifest = folder.manifest()
    if now is not None and manifest.get("architecture") != now:
        with replacing(folder.path / "manifest.json") as temporary:
            temporary.write_text(json.dumps({**manifest, "architecture": now}, indent=2, sort_keys=True) + "\n")
