"""Studies: questions that take many runs. They return data; printing is the command line's job."""
