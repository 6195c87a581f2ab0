"""The gradient matrix: its cells, what transformers has for them, what ranks measure, and how far off it is."""
