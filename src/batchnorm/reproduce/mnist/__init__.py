"""Figure 1, and the claims that can be tested with Section 4.1's network on MNIST."""
