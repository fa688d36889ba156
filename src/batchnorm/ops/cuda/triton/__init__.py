"""Triton kernels; nothing else imports triton. tile: what a program sees, meet: how programs wait, then the passes."""
