"""Triton kernels; nothing else imports triton."""
