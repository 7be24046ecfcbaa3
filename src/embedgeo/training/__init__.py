"""The monitor: when to measure while a model trains, and an adapter for each trainer."""
