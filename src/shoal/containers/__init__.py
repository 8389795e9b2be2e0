"""Jobs in images: what an image is, the commands that keep images on hosts, and what the engine's files say.

Pure functions over text; `remote/image_store.py` keeps images, `remote/runner/image.py` runs a command in one.
"""
