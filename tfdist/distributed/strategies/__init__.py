"""One module per `tf.distribute` strategy or library that spans processes; each builds a `Distribution`."""
