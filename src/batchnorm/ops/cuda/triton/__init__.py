"""Triton kernels: tile (what a program sees), barrier (how programs wait), the passes. Nothing else imports triton."""
