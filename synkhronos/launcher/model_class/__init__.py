"""Model classes: what one must offer, the base class `Model`, and the recorder that its methods get."""
