"""PatrickStar measured beside its opponents: `run.py` measures, `render.py` writes the page."""
