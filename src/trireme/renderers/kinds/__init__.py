"""A module for each renderer of the project, named as `renderer.name` is; its `RENDERER` is the class."""
