"""How well a model predicts documents."""
