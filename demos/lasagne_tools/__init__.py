"""What the Lasagne demos share.

`library`
    The graph library of this environment, and Lasagne next to it.
`batch_norm`
    A batch normalisation layer with running averages.
`layers`
    Convolution with groups, and the mean of each channel.
`options`
    The arguments that all scripts take.
`batches`
    Which rows a step takes, and a validation piece by piece.
`fit`
    Epochs with a progress bar, and their times.
`report`
    What a run showed: a table, a file.
"""
