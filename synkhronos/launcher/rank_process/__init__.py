"""The processes of ranks: the master is rank 0, and each rank trains an instance of the model class."""
