export WORD="set up"
