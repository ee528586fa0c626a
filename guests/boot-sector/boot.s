# A real-mode guest in one sector, for accelerators that boot no ordinary
# kernel. It proves that memory, disk and serial line go on together after a
# fail-over. One round of its endless loop:
#
#   1. count:  the 32-bit counter grows by one
#   2. memory: the counter goes into the first word of each of 64 pages,
#              from physical address 0x20000 on
#   3. disk:   every 16th round, "CNTR" and the counter (32 bits, little
#              endian) are written to sector 1 + (counter / 16) % 256
#   4. serial: the same counter is printed, as 8 hexadecimal digits and a
#              newline; then it rests until the BIOS's clock ticks, 18 times a
#              second: tests have many such guests
#
# So a printed counter is in memory and was written to the disk before, and a
# counter on the serial line or on the disk is always 16 more than the one
# before it. A write that fails prints a line with `!`.

.code16
.globl _start

.set SERIAL,      0x3f8
.set COUNTER,     0x600         # physical; below the sector itself
.set SECTOR,      0x800         # what goes to disk, 512 bytes
.set PAGES,       64
.set FIRST_PAGE,  0x2000        # as a segment: physical 0x20000
.set PAGE,        0x100         # as a segment: 4096 bytes
.set ROUNDS_MASK, 0xf           # disk and serial every 16th round

_start:
    cli
    xorw %ax, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    movw $_start, %sp
    cld
    sti
    movb %dl, drive             # the BIOS says what it booted from

    movw $COUNTER, %di          # counter and sector buffer start as zeros
    movw $(SECTOR + 512 - COUNTER) / 2, %cx
    rep stosw
    movl $0x52544e43, SECTOR    # "CNTR"

round:
    incl COUNTER
    movl COUNTER, %ebx

    movw $FIRST_PAGE, %ax
    movw $PAGES, %cx
page:
    movw %ax, %es
    movl %ebx, %es:0
    addw $PAGE, %ax
    loop page

    testb $ROUNDS_MASK, %bl
    jnz round

    movl %ebx, SECTOR + 4
    movl %ebx, %eax
    shrl $4, %eax
    movzbl %al, %eax            # sector 1 + (counter / 16) % 256
    incl %eax
    movl %eax, packet_lba
    movw $packet, %si
    movb drive, %dl
    movw $0x4300, %ax           # extended write, without verify
    int $0x13
    movb $'!', %al              # a failed write is reported, never hidden
    jc report_failure

    movl COUNTER, %ebx          # BIOS calls may change registers
    movb $8, %cl
digit:
    roll $4, %ebx
    movb %bl, %al
    andb $0xf, %al
    addb $'0', %al
    cmpb $'9', %al
    jbe 1f
    addb $'a' - '0' - 10, %al
1:  call print
    decb %cl
    jnz digit
newline:
    movb $'\n', %al
    call print
    hlt
    jmp round

report_failure:
    call print
    jmp newline

# print: sends %al once the serial port takes it. Changes %dx, %ah.
print:
    movb %al, %ah
    movw $SERIAL + 5, %dx
1:  inb %dx, %al
    testb $0x20, %al
    jz 1b
    movb %ah, %al
    movw $SERIAL, %dx
    outb %al, %dx
    ret

drive: .byte 0
.balign 4
packet:                         # disk address packet
    .byte 16, 0
    .word 1                     # sectors
    .word SECTOR, 0             # buffer: offset, segment
packet_lba:
    .long 0, 0

.org 510
.word 0xaa55
