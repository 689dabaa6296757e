"""The reference paper's experiments (SSDTrain, arXiv 2408.10013), one module for each, and the page that shows them."""
