"""A page that shows what trained models attend to in depth while somebody types."""
