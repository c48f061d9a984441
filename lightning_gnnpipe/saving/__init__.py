"""Checkpoint files: histories beside a checkpoint, and checkpoints as sharded folders."""
