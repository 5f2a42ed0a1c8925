"""The suite. A package, since learn2learn installs one of the same name."""
