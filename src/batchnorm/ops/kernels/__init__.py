"""Triton kernels; nothing else imports triton. `tile` says what a program sees, `forward` and `backward` what it does."""
