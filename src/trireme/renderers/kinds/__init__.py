"""One module for each renderer of the project. The module's name is the value of `renderer.name` that chooses the
renderer; `RENDERER` in the module is the renderer's class."""
