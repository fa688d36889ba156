"""Triton kernels; nothing else imports triton. tile: what a program sees, barrier: how programs wait, then the passes."""
