"""Random plans of faults against simulated clusters: no rule may be broken, and the rules notice what is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from jurymast.agent.io import Phases
from jurymast.core.checkpoints.checkpoints import RestoreChoice
from jurymast.core.keeper.effects import Serve
from jurymast.core.run import machine, restoring
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.effects import Effect, Instruction
from jurymast.core.state.messages import WritePhase
from jurymast.core.state.run import RunState
from jurymast.errors import UsageError
from jurymast.sim.cluster.__main__ import several
from jurymast.sim.cluster.cluster import Cluster, run
from jurymast.sim.cluster.oracle import TOLD_S, Oracle
from jurymast.sim.cluster.plans import (
    KINDS,
    Fault,
    Plan,
    mixed_plan,
    pooled_plan,
    random_plan,
    refilled_plan,
)
from jurymast.sim.cluster.supervisor import SimSupervisor
from jurymast.sim.cluster.world import Process, World, WritePlace
from support.planted import (
    away_while_the_others_cannot_start,
    cut_off_alone,
    damaged_where_it_is_restored,
    ends_while_another_rules,
    exactly,
    host_lost_while_a_launch_waits,
    last_spare_while_clocks_differ,
    lost_before_a_takeover,
    never_beyond_a_step,
    only_storage_that_hangs_is_left,
    rolled_back_at_a_takeover,
    stalled_and_then_blind,
    stalled_while_views_are_old,
    still_for_a_moment,
    taken_over_when_the_journal_is_long,
    uneven_by_design,
)
from support.planted_refill import removed_while_another_is_lost
from support.planted_told import step_ends

SEEDS = range(120)
# Each broke a rule once.
MENDED = {
    "ranks saved nothing while Slurm did not say what a signal meant": (
        '{"seed":0,"active":2,"spares":2,"ranks":1,"cadence_steps":5,"room":8,"faults":['
        '{"at":11.07,"kind":"slurm silent","seconds":30.0},{"at":11.57,"kind":"signal all"}]}'
    ),
    "ranks that were to be placed anew skipped each save for want of memory": (
        '{"seed":129100148,"active":3,"spares":0,"ranks":2,"cadence_steps":5,"room":8,"tests":true,"lives":true,'
        '"spread":"twins","least":2,"pool":0,"faults":[{"at":3.71,"kind":"power","node":2,"other":1,'
        '"seconds":39.47},{"at":19.52,"kind":"supervisor","node":2,"other":1}]}'
    ),
    "a run that held its nodes for another was told to be down": (
        '{"seed":129100563,"active":3,"spares":0,"ranks":1,"cadence_steps":5,"room":1,"copy_s":7.2,'
        '"at_term":"stays","kill_on_bad_exit":true,"spread":"twins","least":1,"pool":2,'
        '"faults":[{"at":11.26,"kind":"power","node":1,"other":2}]}'
    ),
    "what a preempted attempt had restored was told of the next": (
        '{"seed":129100359,"active":3,"spares":0,"ranks":1,"cadence_steps":5,"room":8,"pool":1,"members":1,'
        '"spread":"twins","at_term":"goes on","faults":[{"at":10.03,"kind":"rank","node":0},'
        '{"at":11.0,"kind":"grace","node":2,"other":1,"seconds":0.52}]}'
    ),
    "a node that joined as its small job was ended was blamed for leaving": (
        '{"seed":128201238,"active":4,"spares":1,"ranks":1,"cadence_steps":5,"room":8,"pool":2,"renews":true,'
        '"spread":"twins","at_term":"leaves by signal","faults":['
        '{"at":4.95,"kind":"power","node":3,"seconds":0.31},'
        '{"at":15.76,"kind":"timeout","node":3,"other":4}]}'
    ),
    "a run of one node was told to be without replicas": (
        '{"seed":128200764,"active":2,"spares":0,"ranks":1,"cadence_steps":null,"room":8,"tests":true,"least":1,'
        '"at_term":"leaves by signal","faults":[{"at":3.2,"kind":"gpu lost","node":0,"other":1,'
        '"when":"launching"}]}'
    ),
    "a run that is requeued before Slurm's limit was told to have held no nodes": (
        '{"seed":128300124,"active":2,"spares":2,"ranks":2,"cadence_steps":5,"room":8,"pool":3,"renews":true,'
        '"at_term":"loses","faults":[{"at":2.96,"kind":"rank","node":1,"other":2,"when":"stopping"},'
        '{"at":9.66,"kind":"timeout","node":3,"other":1}]}'
    ),
    "ranks that save to storage together waited for nobody's save": (
        '{"seed":128100484,"active":4,"spares":1,"ranks":1,"cadence_steps":5,"room":1,"least":3,"pool":1,'
        '"spread":"apart","faults":[{"at":9.19,"kind":"drained","node":3,"other":1},'
        '{"at":18.82,"kind":"drained","node":0,"other":2}]}'
    ),
    "fewer ranks wait for a write that takes long": (
        '{"seed":127000869,"active":4,"spares":0,"ranks":2,"cadence_steps":5,"room":8,"copy_s":9.7,"least":1,'
        '"at_term":"leaves","faults":[{"at":5.42,"kind":"power","node":1,"other":2,"seconds":1.85}]}'
    ),
    "ranks that began after Slurm's order to end left with 0 at the signal": (
        '{"seed":105006010,"active":2,"spares":1,"ranks":2,"cadence_steps":5,"room":8,'
        '"faults":[{"at":4.28,"kind":"preempted","node":0,"other":2},'
        '{"at":5.82,"kind":"snap","node":1,"other":2},'
        '{"at":10.36,"kind":"half told","node":2,"other":1},'
        '{"at":11.21,"kind":"supervisor","node":2,"other":1},'
        '{"at":15.42,"kind":"caught","node":1,"other":0,"seconds":0.71}],"last_step":82,"copy_s":6.4,'
        '"at_term":"goes on","lives":true,"spread":"apart"}'
    ),
    "storage is full when a run is requeued, and an agent joins when the others leave": (
        '{"seed":105005624,"active":3,"spares":1,"ranks":1,"cadence_steps":null,"room":1,'
        '"faults":[{"at":9.42,"kind":"storage full","node":1,"other":3,"seconds":0.3,"when":"requeued"},'
        '{"at":13.39,"kind":"rank","node":2,"other":0},'
        '{"at":16.99,"kind":"power","node":1,"other":3,"seconds":35.56}],"at_term":"leaves",'
        '"lives":true,"spread":"apart","least":2,"pool":0}'
    ),
    "a signal is caught, a node freezes, and a rank is stopped at the same moment": (
        '{"seed":106006523,"active":3,"spares":0,"ranks":2,"cadence_steps":5,"room":8,'
        '"faults":[{"at":5.34,"kind":"caught","node":0,"other":1,"seconds":0.36},'
        '{"at":6.05,"kind":"freeze","node":0,"other":1,"seconds":4.0},'
        '{"at":6.09,"kind":"stopped","node":1,"other":2,"seconds":0.43},'
        '{"at":12.79,"kind":"rank","node":0,"other":2}],"at_term":"loses","lives":true,"spread":"apart",'
        '"pool":1}'
    ),
    "ranks went on in process from a state that was rolled back": (
        '{"seed":108009598,"active":2,"spares":0,"ranks":1,"cadence_steps":5,"room":1,'
        '"faults":[{"at":9.38,"kind":"fails tests","node":0,"other":1},'
        '{"at":11.28,"kind":"agent","node":0,"other":1,"seconds":3.71,"when":"stopping"},'
        '{"at":13.27,"kind":"corrupt","node":0,"other":1},'
        '{"at":14.49,"kind":"rollback","node":0,"other":1},'
        '{"at":15.04,"kind":"rank","node":0,"other":1}],"at_term":"stays","tests":true,"lives":true,'
        '"pool":1}'
    ),
    "an ill node kept its ranks while another was about to be ready again": (
        '{"seed":101202084,"active":3,"spares":1,"ranks":1,"cadence_steps":5,"room":8,"faults":['
        '{"at":3.87,"kind":"supervisor","node":1},{"at":16.93,"kind":"gpu lost","node":2,"other":3}],'
        '"last_step":92,"tasks":true,"spread":"apart"}'
    ),
    "ranks that stand still have nothing that could be replicated": (
        '{"seed":101203064,"active":3,"spares":1,"ranks":1,"cadence_steps":5,"room":8,"faults":['
        '{"at":4.18,"kind":"supervisor","node":1,"other":3},{"at":6.28,"kind":"gpu lost","node":2,"other":1},'
        '{"at":7.32,"kind":"freeze","node":1,"other":1,"seconds":4.0},'
        '{"at":14.56,"kind":"signal all","node":0,"other":1}],"last_step":0,"at_term":"stays"}'
    ),
    "an attempt had ended before it was heard from which step it had gone on": (
        '{"seed":101102261,"active":4,"spares":2,"ranks":2,"cadence_steps":5,"room":8,"faults":['
        '{"at":4.84,"kind":"agent stops","node":3,"other":2,"seconds":0.3,"when":""},'
        '{"at":6.36,"kind":"power","node":4,"other":2,"seconds":0.0,"when":""},'
        '{"at":7.37,"kind":"flaps","node":0,"other":5,"seconds":1.37,"when":"stopping"}],'
        '"last_step":0,"copy_s":0.0,"at_term":"leaves","tasks":false,"tests":false,"renews":false,"lives":true,"spread":"twins","least":0,"pool":null}'
    ),
    "a node was found bad between a requeue and the end of the job": (
        '{"seed":101002571,"active":4,"spares":1,"ranks":1,"cadence_steps":5,"room":8,"faults":['
        '{"at":4.16,"kind":"gpu lost","node":2,"other":0,"seconds":0.0,"when":"stopping"},'
        '{"at":8.4,"kind":"agent","node":2,"other":1,"seconds":3.98,"when":""},'
        '{"at":8.59,"kind":"power","node":1,"other":1,"seconds":0.0,"when":""},'
        '{"at":9.2,"kind":"freeze","node":4,"other":0,"seconds":4.0,"when":""}],'
        '"last_step":0,"copy_s":0.0,"at_term":"loses","tasks":false,"tests":false,"renews":false,"lives":false,"pool":null}'
    ),
    "an agent was told to stop an attempt of which the next supervisor knows nothing": (
        '{"seed":40000506,"active":2,"spares":1,"ranks":1,"cadence_steps":null,"room":8,"faults":['
        '{"at":6.43,"kind":"storage hangs here","node":0,"other":1,"seconds":5.11},'
        '{"at":7.33,"kind":"rank","node":1},{"at":9.31,"kind":"half told","node":1}]}'
    ),
    "most agents were told to stop an attempt that storage never saw": (
        '{"seed":40002640,"active":3,"spares":1,"ranks":2,"cadence_steps":null,"room":8,"faults":['
        '{"at":1.31,"kind":"storage hangs","node":1,"seconds":20.43},'
        '{"at":10.63,"kind":"half told","node":3,"other":2,"when":"launching"}]}'
    ),
    "a node whose task has failed is away for a moment, and dismissed when it is back": (
        '{"seed":1034,"active":2,"spares":0,"ranks":1,"cadence_steps":5,"room":1,"tasks":true,"faults":['
        '{"at":10.43,"kind":"freeze","node":1,"seconds":4.0}]}'
    ),
    "a rank fails within a second of a stray SIGTERM": (
        '{"seed":537,"active":4,"spares":1,"ranks":1,"cadence_steps":null,"room":8,"faults":['
        '{"at":8.46,"kind":"signal all","node":0,"other":4},{"at":8.89,"kind":"rank","node":1,"other":4}]}'
    ),
    "a rank fails seconds after a stray SIGTERM": (
        '{"seed":777000005,"active":4,"spares":0,"ranks":1,"cadence_steps":null,"room":8,"faults":['
        '{"at":5.13,"kind":"signal all"},{"at":7.49,"kind":"rank"}]}'
    ),
    "a node that writes the last checkpoint is lost, and another has it all": (
        '{"seed":986,"active":2,"spares":0,"ranks":1,"cadence_steps":5,"room":8,"copy_s":5.6,'
        '"faults":[{"at":7.02,"kind":"grace","seconds":0.3},{"at":8.44,"kind":"storage hangs","seconds":4.0},'
        '{"at":16.18,"kind":"isolate","node":1,"seconds":6.0},{"at":23.06,"kind":"freeze","node":1,'
        '"seconds":4.0}]}'
    ),
    "somebody gives up the last checkpoint of a run that is over": (
        '{"seed":777004292,"active":3,"spares":0,"ranks":1,"cadence_steps":5,"room":1,"last_step":82,'
        '"copy_s":5.0,"faults":[{"at":15.57,"kind":"given up"}]}'
    ),
    "a node is away for a moment when all are told to leave, and ranks have a minute for that": (
        '{"seed":93000928,"active":4,"spares":1,"ranks":1,"cadence_steps":5,"room":1,"faults":['
        '{"at":10.59,"kind":"grace","node":2,"seconds":32.36},'
        '{"at":11.63,"kind":"freeze","node":2,"seconds":4.0}],"last_step":57}'
    ),
    "tasks are stopped by a supervisor that dies, one after it has failed, and the next hears only of that": (
        '{"seed":93003819,"active":3,"spares":0,"ranks":2,"cadence_steps":5,"room":8,"tasks":true,"faults":['
        '{"at":19.56,"kind":"half told","node":1}]}'
    ),
    "a task fails while storage hangs, and the supervisor's node is lost": (
        '{"seed":700636,"active":4,"spares":0,"ranks":2,"cadence_steps":5,"room":1,"tasks":true,"faults":['
        '{"at":3.28,"kind":"clock","node":2},{"at":10.22,"kind":"storage hangs","seconds":43.13},'
        '{"at":11.77,"kind":"power"}]}'
    ),
    "a run of tasks ends while its storage is full": (
        '{"seed":93007813,"active":4,"spares":0,"ranks":1,"cadence_steps":5,"room":8,"tasks":true,"faults":['
        '{"at":13.82,"kind":"storage full","seconds":27.05},{"at":17.57,"kind":"agent"}]}'
    ),
    "a run of tasks ends while its storage fails, and then the supervisor dies": (
        '{"seed":700056,"active":3,"spares":2,"ranks":2,"cadence_steps":5,"room":1,"tasks":true,"faults":['
        '{"at":9.79,"kind":"stale handles","seconds":23.0},{"at":17.76,"kind":"supervisor"}]}'
    ),
    "an image is damaged, and the ranks that leave save no other": (
        '{"seed":95002320,"active":3,"spares":1,"ranks":1,"cadence_steps":null,"room":8,"at_term":"leaves",'
        '"faults":[{"at":12.66,"kind":"corrupt","node":2},{"at":14.46,"kind":"caught","node":3,"other":1,'
        '"seconds":18.68}]}'
    ),
    "a rank leaves, another loses it, and then the supervisor dies": (
        '{"seed":95003135,"active":4,"spares":1,"ranks":1,"cadence_steps":5,"room":1,"faults":['
        '{"at":8.14,"kind":"caught","node":2,"other":1,"seconds":4.11},{"at":10.01,"kind":"supervisor"}]}'
    ),
    "a node is lost, one spare fails its tests, and the other's driver tells of another's failure": (
        '{"seed":97007187,"active":4,"spares":2,"ranks":1,"cadence_steps":5,"room":8,"tasks":true,"tests":true,'
        '"at_term":"goes on","faults":[{"at":4.61,"kind":"fails tests","node":3,"other":2},'
        '{"at":8.44,"kind":"stray finding","other":1},{"at":8.65,"kind":"power","node":1,"other":1}]}'
    ),
    "a supervisor dies while nodes restore, and the next starts that anew": (
        '{"seed":98003829,"active":3,"spares":1,"ranks":2,"cadence_steps":5,"room":8,"last_step":41,'
        '"at_term":"leaves by signal","faults":[{"at":5.32,"kind":"half told","node":0,"other":1},'
        '{"at":5.48,"kind":"supervisor","node":0,"other":1}]}'
    ),
    "a supervisor dies before the start, and nodes cannot look up the next for half a minute": (
        '{"seed":98004799,"active":2,"spares":2,"ranks":1,"cadence_steps":null,"room":8,"last_step":69,'
        '"tests":true,"faults":[{"at":1.99,"kind":"power","node":0,"other":3},'
        '{"at":5.25,"kind":"storage hangs","node":1,"other":3,"seconds":4.0},'
        '{"at":7.92,"kind":"storage hangs","node":3,"other":2,"seconds":31.49}]}'
    ),
    "a node whose task had failed loses its GPU": (
        '{"seed":98006156,"active":3,"spares":2,"ranks":1,"cadence_steps":5,"room":8,"at_term":"goes on",'
        '"tasks":true,"faults":[{"at":16.8,"kind":"gpu lost","node":2,"other":3}]}'
    ),
    "a rank leaves by its signal, another loses it, and the supervisor dies": (
        '{"seed":98007357,"active":2,"spares":1,"ranks":1,"cadence_steps":5,"room":8,"tests":true,'
        '"at_term":"leaves by signal","faults":[{"at":7.74,"kind":"caught","node":2,"other":1,'
        '"seconds":0.43},{"at":8.1,"kind":"supervisor","node":2,"other":1}]}'
    ),
    "ranks hang, and then Slurm leaves them a minute": (
        '{"seed":98502157,"active":2,"spares":1,"ranks":1,"cadence_steps":5,"room":8,"faults":['
        '{"at":9.85,"kind":"power","node":2,"seconds":0.37},{"at":16.12,"kind":"hang","node":0,"other":1,'
        '"seconds":15.45},{"at":19.63,"kind":"grace","node":2,"seconds":22.85}]}'
    ),
    "ranks are stopped by a signal, and then Slurm leaves them a minute": (
        '{"seed":98502157,"active":2,"spares":1,"ranks":1,"cadence_steps":5,"room":8,"faults":['
        '{"at":16.12,"kind":"stopped","node":0,"other":1,"seconds":15.45},'
        '{"at":16.6,"kind":"grace","node":2,"seconds":22.85}]}'
    ),
    "a node whose clock jumped loses its GPU": (
        '{"seed":98502437,"active":2,"spares":1,"ranks":2,"cadence_steps":null,"room":8,"faults":['
        '{"at":10.88,"kind":"clock","node":1,"other":2},{"at":16.81,"kind":"gpu lost","node":1,"other":2}]}'
    ),
    "a replica is tried again after a node was frozen for a moment": (
        '{"seed":98506232,"active":2,"spares":0,"ranks":1,"cadence_steps":null,"room":8,"faults":['
        '{"at":9.76,"kind":"freeze","node":1,"other":0,"seconds":1.38}]}'
    ),
    "a write is cancelled while its storage hangs, and what was lent to it is gone when that answers": (
        '{"seed":98508441,"active":2,"spares":2,"ranks":1,"cadence_steps":5,"room":8,"last_step":44,'
        '"faults":[{"at":18.37,"kind":"storage hangs","node":1,"other":2,"seconds":58.82},'
        '{"at":22.97,"kind":"power","node":1,"other":3}]}'
    ),
    "a rank is killed while all save for a signal after which they go on": (
        '{"seed":99705814,"active":3,"spares":1,"ranks":2,"cadence_steps":null,"room":1,"at_term":"goes on",'
        '"faults":[{"at":16.3,"kind":"half told","node":3,"other":1},'
        '{"at":19.92,"kind":"caught","node":2,"other":3,"seconds":2.11},'
        '{"at":20.0,"kind":"rank","node":1,"other":3}]}'
    ),
    "a node has ranks although it failed its tests, and a better one is ready at the next failure": (
        '{"seed":99706965,"active":3,"spares":1,"ranks":2,"cadence_steps":null,"room":8,"tests":true,'
        '"at_term":"leaves by signal","faults":[{"at":2.35,"kind":"host","node":1,"other":2},'
        '{"at":7.66,"kind":"fails tests","node":0,"other":1},'
        '{"at":12.12,"kind":"hang","node":2,"other":0,"seconds":1.19}]}'
    ),
    "a node is lost, and that whose GPU is broken has its torchrun host replaced meanwhile": (
        '{"seed":99801932,"active":4,"spares":2,"ranks":1,"cadence_steps":5,"room":8,"last_step":83,'
        '"at_term":"goes on","tasks":true,"faults":[{"at":10.25,"kind":"freeze","node":3,"other":5,'
        '"seconds":4.0},{"at":10.42,"kind":"gpu lost","node":4,"other":0}]}'
    ),
    "a rank leaves early while no supervisor is there, and the other then loses it": (
        '{"seed":99902180,"active":2,"spares":1,"ranks":1,"cadence_steps":5,"room":8,"last_step":88,'
        '"copy_s":8.9,"at_term":"loses","faults":[{"at":3.32,"kind":"signal all","node":0,"other":1},'
        '{"at":3.69,"kind":"supervisor","node":0,"other":1},'
        '{"at":5.33,"kind":"storage slow","node":1,"other":0,"seconds":11.15},'
        '{"at":6.0,"kind":"supervisor","node":0,"other":0}]}'
    ),
    "a torchrun host dies while ranks leave after a signal": (
        '{"seed":70002,"active":3,"spares":0,"ranks":1,"cadence_steps":5,"room":1,"faults":['
        '{"at":4.84,"kind":"gpu doubtful","node":1},{"at":5.54,"kind":"caught","other":1,"seconds":6.16},'
        '{"at":8.42,"kind":"host","node":2}]}'
    ),
    "a supervisor has told all to leave for a requeue when another has taken over": (
        '{"seed":100100959,"active":3,"spares":0,"ranks":1,"cadence_steps":5,"room":8,"at_term":"leaves",'
        '"tests":true,"faults":[{"at":19.75,"kind":"power","node":1,"other":2},'
        '{"at":21.34,"kind":"freeze","node":0,"other":2,"seconds":4.0}]}'
    ),
    "tests are begun anew by the next supervisor, and a node is frozen in the time that is left": (
        '{"seed":100100961,"active":4,"spares":2,"ranks":1,"cadence_steps":null,"room":8,"tests":true,'
        '"faults":[{"at":2.78,"kind":"power","node":2,"other":1,"seconds":18.86},'
        '{"at":5.12,"kind":"supervisor","node":3,"other":1},'
        '{"at":6.92,"kind":"freeze","node":4,"other":2,"seconds":4.0}]}'
    ),
    "tasks end while no supervisor is there, and then a stray SIGTERM comes": (
        '{"seed":300364,"active":2,"spares":0,"ranks":1,"cadence_steps":null,"room":8,"last_step":99,'
        '"tasks":true,"tests":true,"faults":['
        '{"at":7.08,"kind":"supervisor","node":1,"when":"launching"},'
        '{"at":7.34,"kind":"signal all","node":1,"when":"launching"},'
        '{"at":10.49,"kind":"freeze","node":1,"seconds":4.0}]}'
    ),
    "a GPU fails on a node whose task has ended, while others go on": (
        '{"seed":100700672,"active":4,"spares":1,"ranks":1,"cadence_steps":5,"room":1,"at_term":"loses",'
        '"tasks":true,"faults":[{"at":12.69,"kind":"gpu doubtful","node":2,"other":1}]}'
    ),
    "ranks that live have an older step than a node that comes back": (
        '{"seed":100500981,"active":2,"spares":1,"ranks":2,"cadence_steps":5,"room":8,"last_step":96,"copy_s":3.4,'
        '"at_term":"loses","tests":true,"lives":true,"faults":[{"at":7.54,"kind":"agent stops","node":2,'
        '"other":1,"seconds":2.61},{"at":9.86,"kind":"rank","node":0,"other":1}]}'
    ),
    "a torchrun host dies, and the supervisor before it has heard of that": (
        '{"seed":100406209,"active":2,"spares":1,"ranks":1,"cadence_steps":null,"room":8,'
        '"at_term":"leaves by signal","faults":[{"at":1.48,"kind":"storage slow","node":2,"seconds":28.52},'
        '{"at":8.81,"kind":"host","node":1},{"at":9.56,"kind":"supervisor"}]}'
    ),
    "the same rank loses two nodes within seconds, by chance": (
        '{"seed":100404858,"active":4,"spares":2,"ranks":1,"cadence_steps":5,"room":8,"at_term":"goes on",'
        '"faults":[{"at":7.32,"kind":"isolate","node":1,"seconds":10.28},{"at":9.96,"kind":"power","node":5},'
        '{"at":13.48,"kind":"agent","node":3,"other":1}]}'
    ),
    "a GPU fails in a job whose supervisor waits for storage before it can begin": (
        '{"seed":100403418,"active":2,"spares":1,"ranks":1,"cadence_steps":5,"room":8,"copy_s":7.4,"tasks":true,'
        '"at_term":"leaves by signal","faults":[{"at":8.35,"kind":"killed","node":1,"other":2},'
        '{"at":8.47,"kind":"storage hangs","node":0,"other":2,"seconds":36.92},'
        '{"at":13.59,"kind":"gpu doubtful","node":2,"other":1}]}'
    ),
    "a supervisor was cut off when all tasks have ended, and another has just taken over": (
        '{"seed":100401597,"active":2,"spares":1,"ranks":1,"cadence_steps":5,"room":8,"at_term":"loses",'
        '"tasks":true,"faults":[{"at":14.02,"kind":"isolate","node":0,"other":1,"seconds":2.01}]}'
    ),
    "writes take longer than from save to save, and one was held up by storage": (
        '{"seed":100300698,"active":4,"spares":0,"ranks":2,"cadence_steps":null,"room":1,"copy_s":4.9,"faults":['
        '{"at":18.9,"kind":"storage hangs","node":2,"other":3,"seconds":4.0}]}'
    ),
    "both nodes that a third is tested with lose power during the tests": (
        '{"seed":100206807,"active":4,"spares":1,"ranks":2,"cadence_steps":5,"room":1,"last_step":97,'
        '"tests":true,"faults":[{"at":1.89,"kind":"power","node":2,"other":1},'
        '{"at":2.0,"kind":"power","node":1,"other":1}]}'
    ),
    "a node cannot write its share of the last checkpoint, and no time is left for the others": (
        '{"seed":777004675,"active":3,"spares":2,"ranks":1,"cadence_steps":5,"room":8,"copy_s":8.6,"faults":['
        '{"at":5.25,"kind":"preempted"},{"at":19.22,"kind":"stale handles","node":1,"seconds":3.77}]}'
    ),
}


@pytest.mark.parametrize(
    ("copy_s", "faults"),
    [
        # longer than any wait of the past, as of 8 ranks of 140 GB at 0.5 GB/s
        (2240.0, (Fault(8.0, "power", node=1), Fault(2500.0, "snap", node=0))),
        (60.0, (Fault(30.0, "grace", seconds=90.0),)),
        (60.0, (Fault(30.0, "grace", seconds=90.0), Fault(40.0, "supervisor"))),
        (60.0, (Fault(30.0, "signal all"), Fault(31.0, "signal all"), Fault(60.0, "cancelled"))),
        (60.0, (Fault(8.0, "power", node=1), Fault(20.0, "timeout"))),
    ],
    ids=["requeue", "preempted", "taken over", "stray", "hurried"],
)
def test_slow_writes_and_orders_to_leave(copy_s: float, faults: tuple[Fault, ...]) -> None:
    for seed in range(1 if copy_s > 1000.0 else 3):  # one takes seconds
        done = run(Plan(seed, 2, 0, 1, 5, 8, faults, copy_s=copy_s))
        assert not done.broken, done.plan.to_json()
        if faults[0].kind in ("power", "grace") and len(faults) == 1:
            assert done.lives == 2, "it was not started again"


def test_a_supervisor_that_dies_in_the_grace_time_of_a_silent_slurm_is_read_rightly_by_the_next_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Again and again, and at last nobody writes an outcome. Slurm keeps accounts in every second
    plan."""
    told: list[tuple[bool, str, str]] = []

    def started_again(self: Oracle, supervisor: SimSupervisor) -> None:
        incident = supervisor.state.incidents[-1]
        told.append((self.cluster.accounts, incident.cause, incident.charged))

    monkeypatch.setattr(Oracle, "started_again", started_again)
    dies = [Fault(at, "supervisor") for at in (31.0, 40.0, 49.0, 58.0, 79.5)]
    faults = (Fault(29.0, "slurm silent", seconds=60.0), Fault(30.0, "grace", seconds=20.0), *dies)
    for seed in range(6):
        done = run(Plan(seed, 2, 1, 1, 5, 8, faults, copy_s=60.0))
        assert (done.broken, done.lives) == ("", 2), done.plan.to_json()
    known, unknown = (True, "preempted", "preemption"), (False, "job_ended", "nobody")
    assert sorted(told) == [unknown] * 3 + [known] * 3


def test_options_that_are_wrong_for_a_small_job_end_no_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is requeued, as without small jobs."""

    async def refuse(self: SimSupervisor, number: int, exclude: tuple[str, ...]) -> str:
        raise UsageError("unknown option --of-a-plugin")

    monkeypatch.setattr(SimSupervisor, "ask_for_node", refuse)
    cluster = Cluster(Plan(3, 2, 0, 1, 5, 8, (Fault(8.0, "power", node=1),), pool=1))
    cluster.run()
    assert (cluster.restarts, cluster.disk.replay().epoch) == (1, 2), (
        "one supervisor for each life of the job"
    )


def test_no_rule_is_broken_where_small_jobs_bring_other_nodes() -> None:
    held = 0
    for seed in range(40):
        cluster = Cluster(plan := refilled_plan(seed))
        cluster.run()
        brought = [*cluster.sites][plan.nodes :]
        held += cluster.restarts == 0 and bool(brought)
    assert held > 5, "runs go on with nodes that small jobs bring"


@pytest.mark.timeout(900)  # on a busy machine
def test_no_rule_is_broken_where_runs_share_a_pool() -> None:
    claimed = 0
    for seed in range(30):
        cluster = Cluster(pooled_plan(seed))
        cluster.run()
        claimed += cluster.team.claimed
    assert claimed > 5, "runs take nodes that wait"


@pytest.mark.timeout(900)  # on a busy machine
def test_no_rule_is_broken() -> None:
    results = several(SEEDS)
    assert [f"{one.broken} {one.plan.to_json()}" for one in results if one.broken] == []
    assert sum(one.steps for one in results) > 50 * len(SEEDS), "the ranks train"
    restores = sum(len(one.restores) for one in results)
    trainings = sum(not one.plan.tasks for one in results)
    assert restores > 1.5 * trainings, "attempts end, and others restore"
    assert sum(one.state == "succeeded" for one in results) > len(SEEDS) / 6, "runs come to their end"
    assert sum(one.lives > 1 for one in results) > len(SEEDS) / 10, "and go on after a requeue"
    assert sum("None" not in restore for one in results for restore in one.restores) > len(SEEDS) / 3


@pytest.mark.parametrize("how", ["drained", "admin drains"])
def test_a_node_that_is_to_leave_leaves_also_if_another_is_lost_first(how: str) -> None:
    for seed in range(4):
        result = run(removed_while_another_is_lost(seed, how))
        assert not result.broken, result.broken


def test_ranks_that_stand_still_for_a_move_wait_no_longer_than_until_their_save_is_known() -> None:
    """What follows the save is decided with the message that completes it, not with the next look."""
    for seed in range(2):
        cluster = Cluster(Plan(seed, 3, 1, 1, 5, 8, (Fault(6.0, "drained", node=2, seconds=200.0),)))
        cluster.run()
        entries = [*cluster.disk.entries()]
        (moved,) = (e["t"] for e in entries if e.get("event") == "Asked" and e["what"] == "drain")
        assert moved in [e["t"] for e in entries if e.get("event") == "Saved"]


@pytest.mark.parametrize("text", MENDED.values(), ids=MENDED)
def test_a_plan_that_broke_a_rule_once_breaks_none(text: str) -> None:
    plan = Plan.from_json(text)
    for seed in (plan.seed, plan.seed + 1):
        assert run(replace(plan, seed=seed)).broken == ""


def test_mixed_plans_have_all_kinds_of_faults_and_of_runs() -> None:
    plans = [mixed_plan(seed) for seed in range(500)]
    assert {fault.kind for plan in plans for fault in plan.faults} == {*KINDS}
    assert any(plan.members for plan in plans)
    assert any(plan.least for plan in plans)


def test_a_seed_and_its_json_give_the_same_again() -> None:
    plan = random_plan(7)
    first, again = run(plan), run(Plan.from_json(plan.to_json()))
    assert (first.events, first.steps, first.restores) == (again.events, again.steps, again.restores)


def test_an_image_that_is_damaged_in_its_own_memory_is_had_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[msg.AskSources] = []
    answer = RestoreChoice.sources

    def counted(self: RestoreChoice, node: str, ask: msg.AskSources) -> Effect:
        asked.append(ask)
        return answer(self, node, ask)

    monkeypatch.setattr(RestoreChoice, "sources", counted)
    plans = exactly(damaged_where_it_is_restored)
    broken = [f"{seed}: {result.broken}" for seed in range(20) if (result := run(plans(seed))).broken]
    assert broken == []
    assert len(asked) > 3


@pytest.mark.parametrize(
    "faults",
    [
        rolled_back_at_a_takeover, last_spare_while_clocks_differ, taken_over_when_the_journal_is_long,
        ends_while_another_rules, stalled_while_views_are_old, stalled_and_then_blind,
        away_while_the_others_cannot_start,
    ],
)  # fmt: skip
def test_no_rule_is_broken_by(
    faults: Callable[[Random], tuple[Fault, ...]],
) -> None:
    plans = exactly(faults)
    broken = [f"{seed}: {result.broken}" for seed in range(20) if (result := run(plans(seed))).broken]
    assert broken == []


def test_no_rule_is_broken_where_slurm_ends_the_step_of_the_agents() -> None:
    results = [run(step_ends(seed)) for seed in range(30)]
    assert [f"{one.plan.seed}: {one.broken}" for one in results if one.broken] == []
    assert sum(one.state == "cancelled" for one in results) > 20, "it ends nothing"


def test_a_run_that_never_gets_beyond_a_step_gives_up() -> None:
    results = [run(exactly(never_beyond_a_step)(seed)) for seed in range(10)]
    assert {(one.broken, one.state) for one in results} == {("", "failed")}


def test_ranks_that_do_more_than_others_keep_their_node() -> None:
    results = [run(exactly(uneven_by_design)(seed)) for seed in range(4)]
    assert {(one.broken, len(one.restores)) for one in results} == {("", 1)}


def test_a_moment_s_stop_of_an_agent_does_not_end_replication() -> None:
    results = [run(still_for_a_moment(seed)) for seed in range(15)]
    assert [f"{one.plan.seed}: {one.broken}" for one in results if one.broken] == []


def test_a_node_with_ranks_is_no_spare_though_its_host_died_after_the_launch() -> None:
    results = [run(host_lost_while_a_launch_waits(seed)) for seed in range(10)]
    assert [f"{one.plan.seed}: {one.broken}" for one in results if one.broken] == []


def test_whom_the_last_supervisor_did_not_hear_takes_part_under_the_next() -> None:
    results = [run(lost_before_a_takeover(seed)) for seed in range(20)]
    assert [f"{one.plan.seed}: {one.broken}" for one in results if one.broken] == []


def test_a_node_that_is_cut_off_alone_does_not_train_beside_who_has_replaced_it() -> None:
    results = [run(cut_off_alone(seed)) for seed in range(30)]
    assert [f"{one.plan.seed}: {one.broken}" for one in results if one.broken] == []
    assert sum(len(one.restores) > 1 for one in results) > 5, "nodes are replaced"


def test_a_restore_from_storage_that_hangs_is_told_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sooner than in earnest: here ranks that do not begin hang after 20 s."""
    monkeypatch.setattr(within, "RESTORE_TOLD_S", 2.0)
    monkeypatch.setattr(restoring, "WAIT_LIMIT_S", 6.0)
    heard: list[ev.RestoreWaits] = []

    def counted(state: RunState, event: ev.RestoreWaits) -> list[Instruction]:
        heard.append(event)
        return restoring.restore_waits(state, event)

    kind: type[ev.Event] = ev.RestoreWaits
    monkeypatch.setitem(machine._HANDLERS, kind, counted)
    plans = exactly(only_storage_that_hangs_is_left)
    broken = [f"{seed}: {result.broken}" for seed in range(20) if (result := run(plans(seed))).broken]
    assert broken == []
    assert sum(event.seconds >= restoring.WAIT_LIMIT_S for event in heard) > 10


def test_a_state_counts_once_its_nodes_had_time_to_report_it() -> None:
    """A node's last image of it, which comes a moment before a choice, is on its way to the supervisor."""
    cluster = Cluster(Plan(0, 2, 0, 1, 5, 8, ()))
    world, oracle = cluster.world, cluster.oracle
    while oracle.best("n1") is None:
        world.run(world.now + 0.1)
    key = oracle.best("n1")
    keeper = next(one for one in cluster.keepers.values() if one.agent.site.name == "n2")
    image = next(one for one in keeper.held if one.key == key)
    oracle.lost(keeper)
    assert oracle.best("n1") is None
    keeper.agent.loop.call(keeper.act, [Serve(image.copy)])
    assert oracle.best("n1") is None
    world.now += TOLD_S + 0.1
    assert oracle.best("n1") is not None


def test_messages_stay_in_order_when_a_process_goes_on_sooner_than_expected() -> None:
    """As a supervisor that waits for its journal, whose write takes less than the limit of that wait."""
    world, process = World(1), Process()
    heard: list[str] = []
    process.stop_until(9.0)
    world.at(1.0, process, heard.append, "hello")

    def ready() -> None:
        process.until = world.now
        world.at(world.now, process, heard.append, "flushed", first=True)
        world.wake(process)

    world.at(2.0, process, heard.append, "beat")
    world.at(3.0, None, ready)
    world.at(3.0, process, heard.append, "held")
    world.at(4.0, process, heard.append, "last")
    world.run(3.5)
    assert heard == ["flushed", "hello", "beat", "held"]
    process.stop_until(6.0)
    world.at(4.5, process, process.stop_until, 8.0)
    world.at(5.0, process, heard.append, "later")
    world.run(7.0)
    assert heard[4:] == ["last"]
    world.run(8.5)
    assert heard[4:] == ["last", "later"]


def test_a_hello_that_waits_for_the_journal_is_not_overtaken() -> None:
    """The plan of seed 9100672, by which one broke: n2 kept a write that the supervisor did not know."""
    faults = (
        Fault(5.87, "stall", 2, 3, 0.34),
        Fault(14.47, "supervisor", 1),
        Fault(15.18, "freeze", 1, 3, 3.43),
    )
    for seed in range(9100672, 9100677):
        assert run(Plan(seed, 4, 1, 1, 5, 8, faults)).broken == ""


@pytest.mark.parametrize("phase", [WritePhase.OPEN, WritePhase.ANNOUNCE, WritePhase.WRITE])
def test_a_write_that_is_cancelled_while_its_storage_hangs_does_nothing_when_that_answers(
    phase: WritePhase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real process was killed by then, and what was lent to it is used for something else."""
    cluster = Cluster(Plan(0, 2, 0, 1, 5, 8, ()))
    world, disk = cluster.world, cluster.disk
    world.run(2.0)
    agent = cluster.sites["n1"].agent
    assert agent is not None
    leads = phase is WritePhase.OPEN
    there = "newer" if leads else "late"
    disk.places = {there: WritePlace(shared_out=True)}
    monkeypatch.setattr(agent.keeper, "read", lambda loan: pytest.fail("it reads what was given back"))
    order = msg.Write(id="late", tier="shared", step=5, attempt=1, ranks=(0,), world=2, lead=leads)
    phases = Phases(lambda reached: None)
    phases.turns.put_nowait(msg.ContinueWrite(id="late", phase=phase))
    cluster.storage.faults["storage hangs", ""] = world.now + 5.0
    lent: list[Any] = [object()]
    tasks: list[asyncio.Task[Any]] = []
    agent.loop.call(lambda: tasks.append(agent.loop.create_task(agent.storage.write(order, lent, phases))))
    world.run(world.now + 2.0)
    agent.loop.call(tasks[0].cancel)
    world.run(world.now + 5.0)
    assert tasks[0].cancelled()
    assert disk.places == {there: WritePlace(shared_out=True)}
