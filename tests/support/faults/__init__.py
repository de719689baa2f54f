"""Programs with injected faults, and the harness that runs and checks them."""
