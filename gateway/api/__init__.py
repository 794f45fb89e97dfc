"""The wires that are served: one file a dialect, each a decoder to a call and an encoder of a reply."""
