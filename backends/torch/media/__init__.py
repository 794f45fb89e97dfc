"""Images and sound as networks read them: decoding, features and the encoders of both."""
