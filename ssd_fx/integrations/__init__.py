"""Callbacks for other people's trainers. Each module needs the library that it is named for."""
