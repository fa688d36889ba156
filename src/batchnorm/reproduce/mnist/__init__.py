"""Figure 1 and the claims that Section 4.1's network on MNIST can show."""
