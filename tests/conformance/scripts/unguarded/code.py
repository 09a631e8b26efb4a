WHOSE = "the code of this project"
