"""Make the pictures of how-to/plots.md: the figures that examples/quickstart.ipynb shows.

    python docs/notebook_pictures.py docs/images

Needs what `make integrations` installs.
"""

import base64
import io
import sys
from pathlib import Path

import nbformat
from dark import save
from nbclient import NotebookClient
from PIL import Image

NAMES = ("profile", "dynamics", "heatmap")

if __name__ == "__main__":
    notebook = nbformat.read(Path(__file__).parent.parent / "examples" / "quickstart.ipynb", 4)
    NotebookClient(notebook, timeout=600).execute()
    data = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [base64.b64decode(each["image/png"]) for each in data if "image/png" in each]
    for name, picture in zip(NAMES, pictures, strict=True):
        save(Image.open(io.BytesIO(picture)), Path(sys.argv[1]) / f"plot-{name}.png")
