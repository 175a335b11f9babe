"""Work on whole data sets before training: tokenize into a store, pack into files; parallel, resumable."""
