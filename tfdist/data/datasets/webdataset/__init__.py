"""`webdataset:/pattern`: tar files by WebDataset's convention, read by number, without that package."""
