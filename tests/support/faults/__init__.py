"""Programs that are hurt at a chosen moment, and what watches them."""
