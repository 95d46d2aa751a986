"""Checkpoints, the last resort: written beside training, loaded when all workers have to be started afresh.

A checkpoint is a plain folder of PyTorch's distributed checkpoint (DCP). `saver` decides when one is written, together
with all ranks; `snapshot` copies the state at a safe point; `saving` writes the copy on a thread, with a process group
of its own; `loading` fills a fresh generation from the newest one that is complete; `folder` knows what complete means.
"""
