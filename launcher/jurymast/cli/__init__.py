"""The commands, one file each."""

from jurymast.interpreter import leave_directory

leave_directory()  # before a command imports anything
