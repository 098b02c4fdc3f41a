"""One module for each renderer of the project. The module's name is the value of `renderer.name`; its `RENDERER` is the
class."""
