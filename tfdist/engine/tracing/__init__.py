"""What is put right in Keras and TensorFlow while a step is traced."""
