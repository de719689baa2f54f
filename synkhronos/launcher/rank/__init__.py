"""The processes of ranks: the master, which is rank 0, and the training of an instance of the model class on each."""
