"""`report.html`: one page about one run, made from the files of its folder alone. None of it imports TensorFlow."""
